"""What a command calls when it joins several rooms."""
