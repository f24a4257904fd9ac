"""Measurements beside peers and physical limits, in the same run.

Owns: what is measured, how figures are made of it, and how they are shown. Never does: judge a
figure without showing it, or keep a goal that was missed to itself. Called by: ``python -m
everstep.bench``, ``everstep bench``, soak tests.
"""
