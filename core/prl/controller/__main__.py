"""`python -m prl.controller RUN_DIR`"""

import sys

from prl.controller.run import main

if __name__ == "__main__":
    main(sys.argv[1])
