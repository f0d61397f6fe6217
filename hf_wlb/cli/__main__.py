"""``python -m hf_wlb.cli``."""

from hf_wlb.cli import app

if __name__ == "__main__":
    app()
