"""The four-region drill: regions that are network namespaces, with links of their own between them."""
