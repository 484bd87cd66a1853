"""Generation over tensor-parallel ranks: heads, feed-forward and vocabulary are cut, one token stream comes out."""
