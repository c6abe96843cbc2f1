"""One file per scheduler behind one protocol."""
