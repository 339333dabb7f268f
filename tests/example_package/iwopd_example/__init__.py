"""One of everything that another package can add to iwopd by entry points alone. docs/extending.md explains it."""
