"""`python -m eval.lambada --model DIR --data FILE`: see `eval.tasks.lambada`."""

import tyro

from eval.tasks import lambada

if __name__ == "__main__":
    lambada.main(tyro.cli(lambada.Options, description=lambada.__doc__))
