{{/* Pods and volume by what they offer, as `outrider plan --pods` reads it. Names of values are told in its messages. */}}
{{- define "outrider.offer" -}}
storage:
  path: {{ .Values.storage.mountPath }}
  {{- if not .Values.storage.existingClaim }}
  size: {{ .Values.storage.size }}
  {{- end }}
{{- if or .Values.indexRedis.urlSecretName .Values.redis.index }}
index_url_in_secret: true
{{- end }}
{{- if .Values.componentTls.verifier }}
component_certificates: [verifier, drafter{{ if .Values.componentTls.retrieval }}, retrieval{{ end }}]
{{- end }}
groups:
  {{- range $group := list "router" "drafting" "verifier" }}
  {{- $values := get $.Values.groups $group }}
  {{- $pods := include "outrider.pods" (list $ $group) | fromJson }}
  {{ $group }}:
    pods: [{{ $pods.min }}, {{ $pods.max }}]
    cpu: {{ $values.cpu | quote }}
    memory: {{ $values.memory | quote }}
    shared_memory: {{ $values.sharedMemory | quote }}
    gpus: {{ $values.gpus }}
    {{- with $values.gpuMemory }}
    gpu_memory: {{ . | quote }}
    {{- end }}
    {{- with $values.gpuDriver }}
    gpu_driver: {{ . | quote }}
    {{- end }}
  {{- end }}
{{- end -}}
