"""`python -m cuboid`, so that torchrun can start it."""

from cuboid.cli import main

main()
