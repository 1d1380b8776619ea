"""SGLang servers, and the ways of weights to them."""
