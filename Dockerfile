FROM golang:1.26-alpine AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
# What logs and metrics call this build: --build-arg VERSION=v1.2.3
ARG VERSION
RUN CGO_ENABLED=0 go build -trimpath -tags timetzdata -ldflags="-s -X main.release=$VERSION" -o /nexusflow .

# Nothing but the binary: no shell, no package to update. Commands that tasks run
# (exec handlers) need an image of their own that copies /nexusflow from here.
FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /nexusflow /nexusflow
ENV HTTP_ADDR=:8000
EXPOSE 8000
USER 65532:65532
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["/nexusflow", "healthcheck"]
ENTRYPOINT ["/nexusflow"]
