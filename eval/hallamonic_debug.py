"""`python -m eval.hallamonic_debug`: see `eval.hallamonic.debug`."""

import tyro

from eval.hallamonic import debug

if __name__ == "__main__":
    debug.main(tyro.cli(debug.Options, description=debug.__doc__))
