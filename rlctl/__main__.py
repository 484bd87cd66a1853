"""``python -m rlctl`` is the same program as the ``rlctl`` script."""

from rlctl.cli import main

raise SystemExit(main())
