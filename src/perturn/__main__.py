"""`python -m perturn`: the command line, where the script is not on the path, as under `accelerate launch -m`."""

from perturn.cli import main

main()
