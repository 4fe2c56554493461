"""List the programs, like `face`: python -m scripts"""

from .face import main

if __name__ == "__main__":
    raise SystemExit(main([]))
