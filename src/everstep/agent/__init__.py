"""The launcher on each node: starts, watches and restarts the workers of a job.

Called by: ``everstep run``. Imports torch for its launcher's public parts alone.
"""
