"""`python -m perturn` runs the command line where its script is not on the path, as under `accelerate launch -m`."""

from perturn.cli import main

main()
