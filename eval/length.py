"""`python -m eval.length --models outputs/a/hf outputs/b/hf`: see `eval.scoring.length`."""

import tyro

from eval.scoring import length

if __name__ == "__main__":
    options, overrides = tyro.cli(length.Options, description=length.__doc__, return_unknown_args=True)
    length.compare(options, overrides)
