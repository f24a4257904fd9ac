"""``python -m everstep``: the command line where the console script is not on the path."""

from everstep.cli import main

if __name__ == "__main__":
    main(prog_name="everstep")
