"""`python -m mpitrain report`: a run as a page and as pictures, for eyes and for talks.

From a run's files to the page: `mpitrain.record.reading` -> `facts` (jobs, stages, who
was late) and `series` (few points that look as all do), `rank_map` -> `curves`,
`stage_bars`, `map_chart` (drawn by matplotlib in a `style`), `words` (what they show),
`tables` -> `page`.
"""
