"""Injects faults into a real run and judges the recovery.

Owns: the plan of faults, the injection, the judgement, the comparison with an undisturbed run.
Never does: touch a process, a store or a job that it did not start. Called by: cli.
"""
