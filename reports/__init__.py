"""Reports: results as one HTML page that needs no network, and pictures of a run.

Modules
-------
page
    `report` makes the page from ``templates`` (Jinja2) and ``assets``; `write_report` writes it.
folders
    Result folders: the command that wrote each, and its files.
run_section, comparison_section, sweep_section, plan_section
    Content of each kind of folder, for the template of the same name.
basis
    Head of every section: warnings, weakest provenance, routing traces.
pictures, run_pictures
    Plotly figures as dictionaries, and their colours; the figures of a run.
cells, headings
    Tables and numbers; the metrics shown, with their headings.
figures, timeline
    The same pictures as Plotly figures and PNG files; a run as a Chrome trace.
"""
