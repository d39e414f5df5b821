"""`python -m eval.hallamonic_phase1 --model DIR --layers 10,15,20`: see `eval.hallamonic.phase1`."""

import tyro

from eval.hallamonic import phase1

if __name__ == "__main__":
    phase1.main(tyro.cli(phase1.Options, description=phase1.__doc__))
