# A server for one exported file: dissensus export RUN -o model.onnx && docker build -t mine . && docker run -p 8000:8000 mine
FROM python:3.12-slim
WORKDIR /srv
COPY . /src
# The server needs no torch: the package goes in without its dependencies, then what serving takes.
RUN pip install --no-cache-dir --no-deps /src \
 && pip install --no-cache-dir typer numpy fastapi uvicorn prometheus-client onnxruntime \
 && rm -rf /src && useradd --no-create-home --uid 10001 server
COPY model.onnx /srv/model.onnx
USER server
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=2)"]
CMD ["dissensus", "serve", "model.onnx", "--host", "0.0.0.0"]
