"""``python -m remat.cli``, for where scripts are not on the path."""

import sys

from remat.cli import main

sys.exit(main())
