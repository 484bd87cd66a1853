"""One set of devices, two lives: a model that trains in one layout and generates in another, in place."""
