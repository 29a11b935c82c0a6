"""Prints the README's own command line below the comment ``<!-- ci: NAME -->``."""

import pathlib
import re
import sys


def readme_command(name: str) -> str:
    text = pathlib.Path(__file__).parent.parent.joinpath("README.md").read_text()
    found = re.search(rf"<!-- ci: {name} -->\s*```\w*\n(.*?)\n```", text, re.S)
    if not found:
        raise SystemExit(f"README.md has no command block marked '<!-- ci: {name} -->'")
    return found[1]


if __name__ == "__main__":
    print(readme_command(sys.argv[1]))
