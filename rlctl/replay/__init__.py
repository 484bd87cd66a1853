"""Re-living recorded steps: what a run recorded is checked, computed again, and compared."""
