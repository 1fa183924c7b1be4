"""Reports: results as one HTML page that needs no network (``page``, of sections by kind of
result), pictures as Plotly's dictionaries (``pictures``) and PNG (``figures``), a run as a Chrome
trace (``run_pictures``), and where time went (``explanation``)."""
