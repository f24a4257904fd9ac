"""What ``everstep doctor`` measures, and what it says of it.

Owns: measuring (disk, machine, pytorch) and judging (findings, pure). Never does: leave anything
behind, take more than 64 MB or about 5 s a probe (importing torch excepted). Called by: cli.doctor.
"""
