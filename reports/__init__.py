"""Reports: results as one HTML page that needs no network.

Modules
-------
page
    `report` puts the page together and `write_report` writes it.
folders
    Which command wrote a folder, and what is in it.
runs, comparisons, sweeps, plans
    The sections of each kind of folder.
charts, scales
    Pictures as inline SVG whose marks say their values.
markup
    Elements, tables and numbers; all text is escaped because elements hold it, never strings.

plots, timeline
    Pictures of a run as PNG; the run as a Chrome trace.

``assets`` has the style sheet and the script of the page.
"""
