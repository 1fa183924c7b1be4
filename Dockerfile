# docker build -t eldr-sim . && docker run --rm -p 127.0.0.1:8050:8050 eldr-sim explore --host 0.0.0.0
# Then http://127.0.0.1:8050; by a name, add --allowed-host NAME
FROM python:3.12-slim AS build
COPY . /source
RUN pip wheel --no-cache-dir --wheel-dir /wheels -c /source/constraints.txt '/source[live]'

FROM python:3.12-slim
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels 'eldr-sim[live]' \
    && useradd --create-home simulator
USER simulator
WORKDIR /home/simulator
# Compiled code and drawn routing: keep them with -v eldr-sim:/home/simulator/.cache
RUN eldr-sim run --topology 1P1D --request-rate 5 --duration 2 --warmup 1 --trace reference-moe
EXPOSE 8000 8050
ENTRYPOINT ["eldr-sim"]
