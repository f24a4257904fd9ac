"""``everstep run`` that has imported what its forked workers will need.

torch imports its compiler with the first optimizer that is made: 1.6 s for each worker.
"""

import torch

from everstep.cli import main

torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
main(prog_name="everstep")
