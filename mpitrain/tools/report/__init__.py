"""`python -m mpitrain report`: a run as a web page and as pictures.

`analysis` finds jobs, where their time went and who was waited for; `curves` and
`rank_map` draw charts in the style of `figures`; `summary` makes tiles, tables and
findings, and `page` the HTML.
"""
