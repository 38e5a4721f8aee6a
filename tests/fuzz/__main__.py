import argparse
import sys

from .trial import main

parser = argparse.ArgumentParser(prog="python -m fuzz", description="Wrong inputs: each must end in success or in one sentence.")
parser.add_argument("cases", type=int, nargs="?", default=10_000)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--first", type=int, default=0, help="number of the first case: a case that failed can be run alone")
sys.exit(main(parser.parse_args()))
