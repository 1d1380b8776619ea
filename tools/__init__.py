"""Programs, which run by their paths. Without this file another package named tools on the path would hide them."""
