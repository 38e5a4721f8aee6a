"""One thread for each process of the tests: they are small, and run on all cores already."""

import os

# More threads than cores cost more than they bring. Set before torch is imported, and passed on to child processes.
os.environ["OMP_NUM_THREADS"] = "1"
