"""`python -m eval.hallamonic --original DIR --converted DIR ...`: see `eval.hallamonic.compare`."""

import tyro

from eval.hallamonic import compare

if __name__ == "__main__":
    compare.main(*tyro.cli(compare.Options, description=compare.__doc__, return_unknown_args=True))
