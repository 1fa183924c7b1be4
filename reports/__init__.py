"""Reports: results as one HTML page that needs no network.

Modules
-------
page
    `report` puts the page together from ``templates`` (Jinja2) and ``assets``; `write_report`
    writes it.
folders
    Which command wrote a folder, and what is in it.
runs, run_pictures, comparisons, sweeps, plans, basis
    What the templates of each kind of folder show.
pictures
    Plotly figures as dictionaries, and their colours.
cells, headings
    Tables and numbers; names of the figures.

plots, timeline
    Pictures of a run as PNG; the run as a Chrome trace.
"""
