"""
Pretrained models whose attention becomes Harmonic:

    python -m fla_harmonic.hallamonic convert --model DIR_OR_HUB_NAME --out DIR --layers all --init attention
"""

import tyro

from fla_harmonic.hallamonic.convert import Convert, convert


def main() -> None:
    app = tyro.extras.SubcommandApp()
    app.command(name="convert")(Convert)
    convert(app.cli(description=__doc__))


if __name__ == "__main__":
    main()
