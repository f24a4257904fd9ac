"""Where signals come from: one file a source (:mod:`everstep.faults.records` says what one is).

Sources observe and nothing else: what a signal means is decided in :mod:`everstep.faults`.
"""
