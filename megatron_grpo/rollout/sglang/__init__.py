"""SGLang servers, and weight sync to them."""
