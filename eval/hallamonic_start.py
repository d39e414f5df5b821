"""`python -m eval.hallamonic_start --model DIR --text FILE --layers none 0 15 0-29`: see `eval.hallamonic.start`."""

import tyro

from eval.hallamonic import start

if __name__ == "__main__":
    start.main(tyro.cli(start.Options, description=start.__doc__))
