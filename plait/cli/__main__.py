"""``python -m plait.cli`` is ``plait``."""

from plait.cli import main

main()
