"""Model engines: loading, forward and backward, optimizer, and handing out weights one tensor at a time."""
