"""What machines have, and where ranks go on them."""
