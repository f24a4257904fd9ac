"""Public means to test what stands on everstep, or a backend of one's own.

``backends``: the conformance suite that every backend must pass (needs pytest). ``faulty``: a
backend that fails on command. ``recording_os``: a disk that loses power. ``snapshots``: snapshots
without torch. Called by: tests and the drill alone.
"""
