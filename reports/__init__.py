"""Reports: results as one HTML page that needs no network, and pictures of a run.

- ``page``: `report` makes the page of ``templates`` (Jinja2) and ``assets``; ``folders``: results;
- ``run_section`` (comparisons, too), ``sweep_section``, ``plan_section``: what a page says of
  each; ``basis``: their heads; ``cells``: tables and the metrics shown;
- ``pictures``, ``run_pictures``: figures as Plotly's dictionaries; ``figures``: the same as PNG;
  ``timeline``: a run as a Chrome trace; ``explanation``: where time went."""
