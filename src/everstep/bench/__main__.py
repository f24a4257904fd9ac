"""``python -m everstep.bench``."""

import sys

from everstep.bench.main import main

sys.exit(main(sys.argv[1:]))
