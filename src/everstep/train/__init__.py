"""The user's side: the attached objects, their step loop and the data position."""

import os

from everstep.train.uncaught import install

install(os.environ)
