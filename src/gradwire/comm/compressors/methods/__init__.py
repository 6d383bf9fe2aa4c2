"""One file per compressor, named as the compressor; the registry finds them by listing this folder."""
