"""Wrong inputs by the thousand: `python -m fuzz 10000 --seed 1` in the folder tests; a few hundred are in test_fuzz.py."""
