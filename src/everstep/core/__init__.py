"""Values only: ids, records, settings, clocks and named fault points.

Never does: I/O, threads, torch. Called by: every room above.
"""
