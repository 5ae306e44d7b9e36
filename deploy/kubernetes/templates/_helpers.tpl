{{/* The release's name, short enough for a group, an index and a hash behind it. */}}
{{- define "atoll.name" -}}
{{- .Release.Name | trunc 36 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels by which pods of a component are selected; "component" is given beside the root. */}}
{{- define "atoll.selector" -}}
app.kubernetes.io/name: atoll
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "atoll.labels" -}}
{{ include "atoll.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "atoll.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end -}}

{{/* What all islands and aggregators connect to: each broker of this release by its own name, or the hub elsewhere. */}}
{{- define "atoll.brokers" -}}
{{- if .Values.hub.enabled -}}
{{- $name := include "atoll.name" . -}}
{{- $all := list -}}
{{- range $i := until (int .Values.broker.replicas) -}}
{{- $all = append $all (printf "tcp://%s-broker-%d.%s-broker:7001" $name $i $name) -}}
{{- end -}}
{{- join "," $all -}}
{{- else -}}
{{- required "hub.address = \"\": without a hub here (hub.enabled = false), give the address of its broker, such as tcp://hub.example.com:7001" .Values.hub.address -}}
{{- end -}}
{{- end -}}

{{- define "atoll.redisEnv" -}}
- name: REDIS_URL
{{- if .Values.redis.enabled }}
  value: redis://{{ include "atoll.name" . }}-redis:6379
{{- else if .Values.redis.urlSecret.name }}
  valueFrom:
    secretKeyRef: { name: {{ .Values.redis.urlSecret.name }}, key: {{ .Values.redis.urlSecret.key }} }
{{- else }}
  value: {{ required "redis.url = \"\": without a Redis here (redis.enabled = false), give redis.url, or redis.urlSecret" .Values.redis.url | quote }}
{{- end }}
{{- end -}}

{{/* As the image demands: user 10001, and nothing written outside of volumes. */}}
{{- define "atoll.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "atoll.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: ["ALL"] }
{{- end -}}

{{/* Fields of a pod that every process of ours has. A service account is of no use to any. */}}
{{- define "atoll.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  {{- include "atoll.podSecurity" . | nindent 2 }}
{{- end -}}

{{/* A whole Secret as a directory, so that a changed one arrives; readable for the group alone, which keys demand. */}}
{{- define "atoll.keysVolume" -}}
- name: keys
  secret:
    secretName: {{ .secret }}
    defaultMode: 0440
    items:
      {{- range .files }}
      - { key: {{ . }}, path: {{ . }} }
      {{- end }}
{{- end -}}

{{- define "atoll.configVolume" -}}
{{- if .Values.config }}
- name: config
  configMap: { name: {{ include "atoll.name" . }}-config }
{{- end }}
{{- end -}}

{{- define "atoll.configMount" -}}
{{- if .Values.config }}
- { name: config, mountPath: /etc/atoll-config, readOnly: true }
{{- end }}
{{- end -}}

{{/* Metrics are for everybody whom the network lets in, and listen under one name in every pod. */}}
{{- define "atoll.metricsArgs" -}}
{{- if .Values.metrics.enabled }}
- --metrics-port
- {{ .Values.metrics.port | int | quote }}
- --metrics-host
- 0.0.0.0
{{- end }}
{{- end -}}

{{- define "atoll.metricsPort" -}}
{{- if .Values.metrics.enabled }}
- { name: metrics, containerPort: {{ .Values.metrics.port | int }} }
{{- end }}
{{- end -}}

{{/* A rule of a NetworkPolicy that lets Prometheus in. */}}
{{- define "atoll.scrapers" -}}
{{- if .Values.metrics.enabled }}
{{- if not .Values.metrics.from }}
{{- fail "metrics.from = []: the network policies would keep Prometheus out; say where it runs, or set networkPolicy.enabled = false" }}
{{- end }}
- ports: [{ port: metrics }]
  from:
    {{- toYaml .Values.metrics.from | nindent 4 }}
{{- end }}
{{- end -}}

{{/* The aggregators' own service account, if they have one. */}}
{{- define "atoll.serviceAccount" -}}
{{- $made := ternary (printf "%s-aggregator" (include "atoll.name" .)) "" (not (empty .Values.aggregator.serviceAccount.annotations)) -}}
{{- .Values.aggregator.serviceAccount.name | default $made -}}
{{- end -}}

{{- define "atoll.configArgs" -}}
{{- if .Values.config }}
- --config
- /etc/atoll-config/config.toml
{{- end }}
{{- end -}}
