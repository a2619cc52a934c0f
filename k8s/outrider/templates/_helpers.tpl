{{/* Name of everything; refuses what Kubernetes, or KubeRay's own names behind it, could not hold. */}}
{{- define "outrider.name" -}}
{{- $name := .Values.fullnameOverride | default (contains "outrider" .Release.Name | ternary .Release.Name (printf "%s-outrider" .Release.Name)) -}}
{{- if gt (len $name) 40 -}}
{{- fail (printf "the release's name makes %q, %d characters: KubeRay's names behind it allow 40; set fullnameOverride, or name the release shorter" $name (len $name)) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Labels by which pods are selected; with (list . "component"). */}}
{{- define "outrider.selector" -}}
{{- $root := first . -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ last . }}
{{- end -}}

{{/* Labels of the release's own objects; with (list . "component"). */}}
{{- define "outrider.labels" -}}
{{- $root := first . -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{- define "outrider.image" -}}
{{- with .Values.image -}}
{{- .repository -}}{{- if .digest -}}@{{ .digest }}{{- else -}}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "outrider.claim" -}}
{{ .Values.storage.existingClaim | default (printf "%s-models" (include "outrider.name" .)) }}
{{- end -}}

{{- define "outrider.account" -}}
{{ include "outrider.name" . }}
{{- end -}}

{{/* Security of a container, as the standard "restricted" asks; with its extra capabilities. */}}
{{- define "outrider.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Selects the pods of Ray's groups, and neither Redis nor tests. */}}
{{- define "outrider.rayPods" -}}
matchLabels:
  app.kubernetes.io/name: outrider
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [head, router, drafting, verifier]}
{{- end -}}

{{/* The secrets that must be there before, as lines "NAME with ENTRIES". */}}
{{- define "outrider.neededSecrets" -}}
{{- $values := .Values -}}
{{- with $values.apiKeys }}{{ with .secretName }}
{{ . }} with {{ $values.apiKeys.secretKey }}{{ end }}{{ end }}
{{- with $values.internalToken }}{{ with .secretName }}
{{ . }} with {{ $values.internalToken.secretKey }}{{ end }}{{ end }}
{{- if not $values.certificates.public.enabled }}{{ with $values.tls.secretName }}
{{ . }} with tls.crt, tls.key{{ end }}{{ end }}
{{- range $role := list "verifier" "drafter" "retrieval" }}{{ with get $values.componentTls $role }}{{ if not $values.certificates.components.enabled }}
{{ . }} with tls.crt, tls.key, ca.crt for {{ $role }}.outrider.internal{{ end }}{{ end }}{{ end }}
{{- with $values.ray.authSecretName }}
{{ . }} with auth_token{{ end }}
{{- with $values.indexRedis.urlSecretName }}
{{ . }} with {{ $values.indexRedis.urlSecretKey }}{{ end }}
{{- with $values.indexRedis.answersSecretName }}
{{ . }} with {{ $values.indexRedis.answersSecretKey }}{{ end }}
{{- with $values.responsesRedis.passwordSecretName }}
{{ . }} with {{ $values.responsesRedis.passwordSecretKey }}{{ end }}
{{- with $values.learningRedis.passwordSecretName }}
{{ . }} with {{ $values.learningRedis.passwordSecretKey }}{{ end }}
{{- if $values.redis.enabled }}
{{ $values.redis.passwordSecretName }} with {{ $values.redis.passwordSecretKey }}{{ if $values.redis.index }}, {{ $values.redis.readerSecretKey }}, {{ $values.redis.publisherSecretKey }}{{ end }}{{ end }}
{{- with $values.ray.gcsFaultTolerance }}{{ if .enabled }}{{ with .passwordSecretName }}
{{ . }} with {{ $values.ray.gcsFaultTolerance.passwordSecretKey }}{{ end }}{{ end }}{{ end }}
{{- with $values.tests.apiKeySecretName }}
{{ . }} with {{ $values.tests.apiKeySecretKey }} (an API key, for helm test){{ end }}
{{- end -}}
